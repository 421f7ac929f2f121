"""Model families, one file each, named as `decoder_block` names them: `spec(config)` and `WEIGHTS`."""
