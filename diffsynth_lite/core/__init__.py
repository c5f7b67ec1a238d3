"""What every model family is trained with; torch and safetensors only."""
