"""The local backend: a plan becomes processes of this machine, owned by one supervisor per run."""
