"""``python -m live``, and so ``torchrun ... -m live [options] train.py ...``: a script with the agent, unchanged."""

if __name__ == "__main__":
    from live.launch import main

    main()
