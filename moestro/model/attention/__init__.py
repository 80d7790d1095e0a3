"""Attention kinds. Every kind keeps packed documents apart and has a key-value cache for decoding."""
