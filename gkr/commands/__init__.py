"""One module per command, each with a `command`.

What is heavy is imported inside the function, because help and completion import the module.
"""
