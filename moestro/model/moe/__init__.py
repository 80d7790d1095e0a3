"""Mixture of experts in four stages: route → dispatch → experts → combine.

Shape letters used in this package: T tokens, D hidden size, E experts, K experts per token (top_k), H expert hidden
size, R expert rows: the (token, expert) pairs that are computed, at most T·K.
"""
