"""From responses to numbers: functions, the processes that they run in, and a sandbox for programs."""
