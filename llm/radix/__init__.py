"""Prefix cache of a hybrid sliding-window model: a radix tree that owns cached KV slots."""
