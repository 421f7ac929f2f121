"""Model families as data: a spec of blocks and a table of weight names each; one decoder builds them all."""
