// A console in the place of the engine: a component that plays CartPole, ticked as the engine does, on one thread.
//
//     game --url http://HOST:PORT --matches N [--period N] [--wait] [--frames]

#include <chrono>
#include <cstring>
#include <thread>

#include "LudusAgentComponent.h"
#include "cart_pole.hpp"

class CartPoleComponent : public ULudusAgentComponent
{
public:
	unsigned Matches = 0;
	std::thread::id Main = std::this_thread::get_id();

protected:
	void OnEpisodeBegin() override
	{
		CheckThread();
		Pole = CartPole(Matches);
		Frames = 0;
	}

	void Observe(TArray<float>& Observation) override
	{
		CheckThread();
		for (int32 Index = 0; Index < 4; ++Index) Observation.Add(Pole.seen()[Index]);
	}

	void Act(const TArray<float>& Continuous, const TArray<int64>& Discrete) override
	{
		CheckThread();
		if (Continuous.Num() != 0 || Discrete.Num() != 1) std::abort();
		Pole.push(Discrete[0] == 1);
		AddReward(1.0f);
		++Frames;
		if (Frames < 500 && !Pole.fallen()) return;
		++Matches;
		std::printf("match %u: %u frames, %d missed\n", Matches, Frames, MissedDecisions());
		if (Pole.fallen()) EndEpisode();
		else InterruptEpisode();
	}

private:
	void CheckThread() const
	{
		if (std::this_thread::get_id() != Main) std::abort();
	}

	CartPole Pole{0};
	unsigned Frames = 0;
};

int main(int Count, char** Words)
{
	CartPoleComponent Agent;
	unsigned Matches = 1;
	bool bFrames = false;
	Agent.DecisionPeriod = 1;
	for (int Index = 1; Index < Count; ++Index)
	{
		const std::string Word = Words[Index];
		if (Word == "--wait") Agent.bWaitForActions = true;
		else if (Word == "--frames") bFrames = true;
		else if (Index + 1 == Count) return 2;
		else if (Word == "--matches") Matches = static_cast<unsigned>(std::atoi(Words[++Index]));
		else if (Word == "--period") Agent.DecisionPeriod = std::atoi(Words[++Index]);
		else if (Word == "--url")
		{
			char Host[256];
			if (std::sscanf(Words[++Index], "http://%255[^:]:%d", Host, &Agent.Port) != 2) return 2;
			Agent.Host = Host;
		}
		else return 2;
	}
	std::setvbuf(stdout, nullptr, _IOLBF, 4096);
	Agent.BeginPlay();
	for (unsigned Frame = 1; Agent.Matches < Matches; ++Frame)
	{
		if (bFrames) std::printf("frame %u\n", Frame);
		Agent.TickComponent(0.02f, LEVELTICK_All, &Agent.PrimaryComponentTick);
		if (bFrames || !Agent.bWaitForActions) std::this_thread::sleep_for(std::chrono::milliseconds(1));
	}
	Agent.EndPlay(EEndPlayReason::Quit);
	return 0;
}
