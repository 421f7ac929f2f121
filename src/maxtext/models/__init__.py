"""Model families as data: each has a spec of blocks and a table of weight names. One decoder builds them all."""
