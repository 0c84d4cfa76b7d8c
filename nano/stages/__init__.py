"""The stages of nano's training, each resumable from its folder under nano/runs."""
