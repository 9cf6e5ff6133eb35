"""Watching a run: events in, a picture on the terminal out.

Whoever watches can go away and come back; the run does not notice.
"""
