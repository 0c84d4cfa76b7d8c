"""transom: a multimodal encode / prefill / decode serving pipeline for hybrid-SWA chat models."""

__version__ = "0.1.0"
