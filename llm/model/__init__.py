"""The MiMo-V2 language model: config, layers, loader (llm processes; knows nothing of requests)."""
