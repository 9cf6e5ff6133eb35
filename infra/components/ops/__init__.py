"""Who is told what about machines, and who may act on it."""
