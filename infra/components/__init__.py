"""Parts of stacks. A component declares its children and registers outputs; it reads no configuration, looks nothing up
and exports nothing, and makes no resource inside an `apply`, where a preview would not see it.
"""
