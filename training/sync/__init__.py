"""How the learners of one experiment become one model: the syncer process and the learner's side of it.

Promises exactly-once merges that survive the death of any process, and bit-equal weights on all learners of one
version. Must not import torch: the syncer has to start fast and stay small, so everything here is numpy, msgspec and
the standard library.
"""
