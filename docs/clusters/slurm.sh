#!/bin/bash
# A run on hosts of a Slurm cluster. From a folder that all hosts see, with rlflow's environment active:
#
#     sbatch --nodes=2 docs/clusters/slurm.sh recipe=grpo_32b
#
# What follows the script's name goes to python -m rlflow. The plan is for the hosts of the job (cluster=auto).
#SBATCH --job-name=rlflow
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=rlflow-%j.log
# Five minutes before the end this script hears of it, so that the run ends with a checkpoint.
#SBATCH --signal=B:USR1@300

set -u

# What NCCL is told must be in the environment of Ray on every host; srun passes it on. See docs/clusters.md.
# export NCCL_SOCKET_IFNAME=eth0
# export NCCL_IB_HCA=mlx5
export RAY_USAGE_STATS_ENABLED=0
# Who knows the token may run anything on these hosts: one for this job, the same on all of them.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(python -c "import secrets; print(secrets.token_hex(32))")
export RAY_AUTH_TOKEN
# srun does not take this over from sbatch by itself.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}

# Slurm runs this script on the first host of the job: Ray's head is here, and so is the run.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD=$head PORT=${RAY_PORT:-6379}

# Ray on every host, until this script ends. --block keeps it within its step of the job, which Slurm cleans up.
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
    --overlap --cpu-bind=none --kill-on-bad-exit=1 \
    bash -c '
        if [ "$SLURM_NODEID" -eq 0 ]; then
            exec ray start --head --port="$PORT" --disable-usage-stats --block
        fi
        until (: < "/dev/tcp/$HEAD/$PORT") 2> /dev/null; do sleep 1; done
        exec ray start --address="$HEAD:$PORT" --disable-usage-stats --block
    ' > "ray-$SLURM_JOB_ID.log" 2>&1 &
cluster=$!
trap 'kill "$cluster" 2> /dev/null; wait "$cluster"' EXIT

# A run plans for the hosts that are there, so all of them must be.
count_hosts='
import ray
ray.init("auto", log_to_driver=False, logging_level="ERROR")
print(sum(node["Alive"] for node in ray.nodes()))
'
for attempt in $(seq 100); do
    if ! kill -0 "$cluster" 2> /dev/null; then
        echo "Ray did not start: see ray-$SLURM_JOB_ID.log" >&2
        exit 1
    fi
    hosts=$(python -c "$count_hosts" 2> /dev/null || echo 0)
    [ "$hosts" -ge "$SLURM_JOB_NUM_NODES" ] && break
    if [ "$attempt" -eq 100 ]; then
        echo "$hosts of $SLURM_JOB_NUM_NODES hosts have joined Ray: see ray-$SLURM_JOB_ID.log" >&2
        exit 1
    fi
    sleep 3
done

python -m rlflow cluster=auto "$@" &
run=$!
# As Ctrl-C: the step ends, a checkpoint is written, and resume=true goes on in the next job.
trap 'kill -INT "$run"' USR1
wait "$run"
status=$?
while kill -0 "$run" 2> /dev/null; do
    wait "$run"
    status=$?
done
exit "$status"
