"""The processes that reward functions run in: any of them may be killed at any time.

A *nursery* is started once, imports what the functions need, and forks *workers* from itself, which takes a
millisecond. A worker that is over its time, or has died, is ended with everything that it has started, and another one
takes its place.
"""
