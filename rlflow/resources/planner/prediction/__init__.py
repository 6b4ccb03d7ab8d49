"""The costs of a layout: seconds of tasks and steps, memory of processes and hosts, and the errors of both."""
