"""`gkr services`: the replicas of a run's services, as its events tell."""
