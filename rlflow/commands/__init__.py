"""The subcommands of ``rlflow``, and what a command leaves out."""
