"""Adapters to other libraries. Each module imports its library when one of its functions is called, never before."""
