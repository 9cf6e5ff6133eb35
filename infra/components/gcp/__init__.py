"""Components of Google Cloud. Every input is a typed argument class: a wrong key of a dict would reach the cloud as is.

Argument names are those of the locked provider, values those of the reference note on A3 machines.
"""
