"""Decoding of images, video and sound in worker processes of an encoder; loads no torch."""
