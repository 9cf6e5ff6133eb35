"""The Pulumi engine, driven by its Automation API with inline programs: what `make preview`, `up` and `down` run.

The program of a stack is `infra.programs.program`, the same that plain `pulumi up` calls. Here is everything around it:
where state is, which binary runs, how long it may take, and what it said.
"""
