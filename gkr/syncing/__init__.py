"""`gkr sync`: the state of a run's sync, asked or told by events."""
