"""The simulator's loop is compiled before tests are timed: the first time it takes a while."""

from flash_attn_fp8.sim import engine

engine.warm_up()
