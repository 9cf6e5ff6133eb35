"""Turns a source of images into a dataset that trainers read: sharded, captioned, named by content."""
