"""`python -m flash_attn_fp8`: the command line."""

from flash_attn_fp8.cli import app

if __name__ == "__main__":
    app(prog_name="python -m flash_attn_fp8")
