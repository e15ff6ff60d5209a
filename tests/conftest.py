"""What holds for every test."""

from jubako.engine.threads import set_own_wait_policy

# Before any test loads PyTorch: its threads must not spin while other processes of a test work.
set_own_wait_policy()
