"""The doctor: reports what a machine has and lacks, and with ``--gpu`` tests what runs need of its GPUs."""
