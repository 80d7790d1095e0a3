"""Mixture of experts in four stages: route → dispatch → experts → combine.

Shape letters used in this package: T tokens, D hidden size (for experts and their exchange: latent_size, if there is
one), E experts, K experts per token (top_k), H expert hidden size, W products before the activation (2 with a gate, 1
without), R expert rows: the (token, expert) pairs that are computed, at most T·K.
"""
