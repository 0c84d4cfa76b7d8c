"""Vision tower and audio path of the MiMo-V2.5 family (encoder process; knows nothing of requests)."""
