#!/bin/bash
# Runs a Rankwise module on this node, in a container if an image is set. Called by submit.sbatch:
#     bash run.sh slurm.launch jobs/0001-timed-1a2b3c4d/job.json
# In the container /app is $CODE_ROOT, /tmp/workspace is $PIPELINE_ROOT, /workspace/models is $SCRATCH_ROOT/models.
exec 3>&1 >&2 # what these lines print is no result of the module
# shellcheck disable=SC1091
command -v module > /dev/null || . /etc/profile
set -e # the first failing line ends the launch on this node
module load apptainer/1.3
module load 'cuda 12'
ulimit -l unlimited
export NCCL_DEBUG=INFO
exec >&3 3>&-
set -u
cd "$PIPELINE_ROOT" || exit
if [ "$1" = slurm.launch ] && [ "${SLURM_NODEID:-}" = 0 ]; then # record the job step of this launch, for its accounting
    printf '{"job_id": "%s.%s", "submitted_at": "%s"}\n' \
        "$SLURM_JOB_ID" "$SLURM_STEP_ID" "$(date -u +%FT%T+00:00)" > "$(dirname "$2")/submission.json"
fi
export PYTHONSAFEPATH=1 # never import from the working directory

if [ -z "$APPTAINER_IMAGE" ]; then
    [ -z "$CODE_ROOT" ] || export PYTHONPATH=$CODE_ROOT
    exec python3 -m "$@"
fi

# bind SOURCE DESTINATION: --bind splits at commas and colons; --mount takes a line of CSV, in which they can be quoted.
bind() {
    case $1 in
        *[,:\"\\]* | *$'\n'*) container+=(--mount "type=bind,\"source=${1//\"/\"\"}\",destination=$2") ;;
        *) container+=(--bind "$1:$2") ;;
    esac
}
container=("$(command -v apptainer || command -v singularity || true)")
[ -n "${container[0]}" ] || {
    echo "APPTAINER_IMAGE: neither apptainer nor singularity found on $(hostname)" >&2
    exit 127
}
# Packages in a home folder must not shadow those of the image.
container+=(exec --nv --env PYTHONNOUSERSITE=1 --pwd /tmp/workspace)
mkdir -p /tmp/workspace # Apptainer shares /tmp, so the bind destination must exist
bind "$PIPELINE_ROOT" /tmp/workspace
[ ! -d "$SCRATCH_ROOT/models" ] || bind "$SCRATCH_ROOT/models" /workspace/models
if [ -n "$CODE_ROOT" ]; then
    bind "$CODE_ROOT" /app
    container+=(--env PYTHONPATH=/app)
fi
container+=(--bind '/data sets:/data:ro')
exec "${container[@]}" "$APPTAINER_IMAGE" /opt/bin/python -m "$@"
