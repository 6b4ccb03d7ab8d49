#!/bin/bash
# A run on hosts of a Slurm cluster. From a folder that all hosts see, with rlflow's environment active:
#
#     sbatch --nodes=2 docs/clusters/slurm.sh recipe=grpo_32b
#
# In containers, with the plug-in pyxis and an image of docs/clusters/Dockerfile (enroot import makes a .sqsh file of it):
#
#     IMAGE=/shared/rlflow.sqsh sbatch --nodes=2 docs/clusters/slurm.sh recipe=grpo_32b
#
# Arguments after the script's name go to python -m rlflow. The plan is for the hosts of the job (cluster=auto).
#SBATCH --job-name=rlflow
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=rlflow-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# Slurm signals this script five minutes before the time limit, which leaves time for a checkpoint.
#SBATCH --signal=B:USR1@300

# bash -c gets functions as text, so ShellCheck sees no call of them.
# shellcheck disable=SC2329

set -u

# Ray on every host passes its environment to the workers. See docs/clusters.md.
# export NCCL_SOCKET_IFNAME=eth0
# export NCCL_IB_HCA=mlx5
export RAY_USAGE_STATS_ENABLED=0
# Anyone with the token can run programs on these hosts: each job has its own.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN
# srun does not take this over from sbatch by itself.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}

# Slurm runs this script on the first host of the job. Ray's head and the run are there, too.
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD PORT=${RAY_PORT:-6379}
container=()
if [ -n "${IMAGE:-}" ]; then
    # The run is in another container than Ray's head, and finds it by files in /tmp.
    container=(--container-image="$IMAGE" --container-mounts="$PWD:$PWD,/tmp:/tmp" --container-workdir="$PWD")
fi

# Ray on every host, until this script ends. --block keeps Ray within its step of the job, which Slurm cleans up.
start_ray() {
    # Its metrics, which nothing reads here, can crash a process that starts.
    export RAY_enable_metrics_collection=0
    # Ray counts all CPUs of the host, and the job may use fewer.
    cpus=--num-cpus=$SRUN_CPUS_PER_TASK
    if [ "$SLURM_NODEID" -eq 0 ]; then
        exec ray start --head --port="$PORT" "$cpus" --disable-usage-stats --block
    fi
    until (: < "/dev/tcp/$HEAD/$PORT") 2> /dev/null; do sleep 1; done
    exec ray start --address="$HEAD:$PORT" "$cpus" --disable-usage-stats --block
}

# Plan and run when all hosts have joined, because a plan is for the hosts that exist. USR1 ends the run after its step,
# with a checkpoint and exit code 143.
run() {
    count_hosts='
import ray
ray.init("auto", log_to_driver=False, logging_level="ERROR")
print(sum(node["Alive"] for node in ray.nodes()))
'
    for attempt in $(seq 100); do
        hosts=$(python -c "$count_hosts" 2> /dev/null || echo 0)
        [ "$hosts" -ge "$SLURM_JOB_NUM_NODES" ] && break
        if [ "$attempt" -eq 100 ]; then
            echo "$hosts of $SLURM_JOB_NUM_NODES hosts have joined Ray: see ray-$SLURM_JOB_ID.log" >&2
            exit 1
        fi
        sleep 3
    done
    # Slurm signals all processes of a step; the run gets SIGTERM in its place.
    (trap '' USR1; exec python -m rlflow cluster=auto "$@") &
    process=$!
    trap 'signalled=yes; kill -TERM "$process"' USR1
    wait_for "$process"
}

# Return the exit code of a process. A signal interrupts bash's wait, which then has to be repeated.
wait_for() {
    wait "$1"
    code=$?
    while [ -n "${signalled:-}" ]; do
        signalled=
        wait "$1"
        code=$?
    done
    return "$code"
}

srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
    --overlap --cpu-bind=none --kill-on-bad-exit=1 "${container[@]}" \
    bash -c "$(declare -f start_ray); start_ray" > "ray-$SLURM_JOB_ID.log" 2>&1 &
cluster=$!
trap 'kill "$cluster" 2> /dev/null; wait "$cluster"' EXIT

# A job that Slurm starts again has the same id, and continues from the last checkpoint.
folder=outputs/slurm-$SLURM_JOB_ID
place=hydra.run.dir=$folder
compgen -G "$folder/checkpoints/step-*" > /dev/null && place=resume=$folder

srun --nodes=1 --ntasks=1 --nodelist="$HEAD" --overlap --cpu-bind=none "${container[@]}" \
    bash -c "$(declare -f run wait_for); run \"\$@\"" rlflow "$place" "$@" &
step=$!
stopping=
trap 'stopping=yes signalled=yes; kill -USR1 "$step"' USR1
wait_for "$step"
status=$?
if [ -n "$stopping" ] && [ "$status" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
