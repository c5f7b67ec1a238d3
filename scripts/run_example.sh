# Sourced by the quickstarts, after environment.sh.

# run_example NAME MAKER SCORER MODEL [ARGUMENT...]: makes the training data, trains NAME.yaml on them with the
# arguments, and scores the LoRA; the makers, scorers and models are those of examples/quickstart.
run_example() {
    local name=$1 maker=$2 scorer=$3 model=$4 example=examples/quickstart
    local run=runs/$name data=runs/${name}_data
    shift 4
    prepare_environment
    # The models are so small that a second thread only waits for the first.
    export OMP_NUM_THREADS=1
    "$PYTHON" "$example/$maker" --output "$data"
    "$PYTHON" -m diffsynth_lite.cli.main train --config "$name.yaml" "$@"
    "$PYTHON" "$example/$scorer" --model "$example/$model" --lora "$run/lora" --data "$data" --output "$run/score"
    cat <<END

Page of the run:     $run/report.html (open it in a browser)
The LoRA:            $run/lora/pytorch_lora_weights.safetensors
Before and after:    $run/score/grid.png
Previews by step:    $run/previews/grid.png
Try other prompts:   $PYTHON -m diffsynth_lite.cli.main sample --lora $run --prompt "..."
Losses and speed:    $run/metrics.jsonl
END
}
