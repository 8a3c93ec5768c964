"""``torchrun ... -m paceenv.live [options] train.py ...``: runs an unchanged script with the agent attached."""

if __name__ == "__main__":
    from paceenv.live.start.run_command import main

    main()
