"""Programs that nobody trusts, run with what an ordinary user of Linux may do: namespaces and limits.

``run`` forks a process that makes new namespaces (``enter``); the first in them, the *guard*, builds a file system
of its own (``root``), starts the program in it with all limits (``confine``) and watches it (``guard``). What the guard
says comes by a pipe that the program never holds; when the guard ends, the kernel kills all that is left in its
namespace.
"""
