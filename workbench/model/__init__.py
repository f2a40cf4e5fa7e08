"""The target: configuration, layers, the hybrid decoder, its MTP head, tokenizer and checkpoint formats."""
