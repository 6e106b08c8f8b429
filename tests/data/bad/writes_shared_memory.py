"""Leaves a file in /dev/shm."""

if __name__ == "__main__":
    with open("/dev/shm/rankproof-left", "w") as file:
        file.write("left")
