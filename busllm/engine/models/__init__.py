"""Models: from `config.json` (`config.py`) and named weights (`build.py`) to the one decoder (`decoder.py`)."""
