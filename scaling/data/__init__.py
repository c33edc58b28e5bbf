"""Corpora, tokenizers and batches. Torch-free: batches are numpy arrays."""
