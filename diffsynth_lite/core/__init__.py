"""What every model family is trained with; torch only."""
