"""Pulumi programs and components: stack configuration -> cloud. The only package that imports pulumi."""
