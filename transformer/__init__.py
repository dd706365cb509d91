"""The decoder-only Transformer language model, whole: from a text file to generated text."""
