"""Reports on a machine: what it has, and with ``--gpu`` whether its GPUs do what runs rely on."""
