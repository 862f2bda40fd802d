from perennial.cli import main

main()
