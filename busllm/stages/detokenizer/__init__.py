"""The detokenizer: `stage.py` is its behaviour, `open_sequence.py` one sequence, `text_rows.py` what goes out."""
