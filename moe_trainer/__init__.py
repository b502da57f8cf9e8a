"""Pretraining of mixture-of-experts language models; the entry point is pretrain_moe.py."""

__version__ = "0.1.0"
