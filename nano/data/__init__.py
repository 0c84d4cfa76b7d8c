"""Training and test material of the nano model: pictures, sounds, videos and dialogues, all by seed."""
