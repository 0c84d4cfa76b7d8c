"""The ranks of an encoder: one process per device that owns the towers, and the front that feeds them."""
