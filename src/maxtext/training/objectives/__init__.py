"""What a run minimises. An objective is a batch contract and a loss; the loop is the same for all."""
