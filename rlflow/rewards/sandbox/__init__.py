"""Runs untrusted programs with the rights of an ordinary Linux user: namespaces, limits and a system call filter.

``run`` forks a child that enters new namespaces. The first process in them, the *guard*, builds a file system of its
own (``root``), starts the program with all limits (``confine``) and watches it. The guard reports through a pipe that
the program never holds. When the guard ends, the kernel kills everything that is left in its namespaces.
"""
