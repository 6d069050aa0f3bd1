#include "LudusAgentComponent.h"

#include "HAL/PlatformMisc.h"
#include "HAL/PlatformTime.h"

namespace
{
// Before the headers of Windows, which have a macro of this name.
FString ReadToken()
{
	return FPlatformMisc::GetEnvironmentVariable(TEXT("LUDUS_TOKEN"));
}
}

THIRD_PARTY_INCLUDES_START
#if PLATFORM_WINDOWS
#include "Windows/AllowWindowsPlatformTypes.h"
#endif
#include "ludus_agent.hpp"
#if PLATFORM_WINDOWS
#include "Windows/HideWindowsPlatformTypes.h"
#endif
THIRD_PARTY_INCLUDES_END

DEFINE_LOG_CATEGORY_STATIC(LogLudus, Log, All);

namespace
{
constexpr int32 QuitMilliseconds = 1000;

std::string Utf8(const FString& Text)
{
	return std::string(TCHAR_TO_UTF8(*Text));
}
}

struct FLudusAgentState
{
	explicit FLudusAgentState(const ludus::Options& Options, const ludus::AgentSettings& Settings) : Loop(Options, Settings) {}

	ludus::AgentLoop Loop;
	ludus::RawWriter Writer;
	std::string Reply;
	TArray<float> Observation;
	TArray<bool> Allowed;
	TArray<float> Continuous;
	TArray<int64> Discrete;
	ludus::Error Reported = ludus::Error::None;
	float Reward = 0.0f;
	int32 TicksToDecision = 0;
	bool bActing = false;
	bool bWarned = false;
	bool bBegin = true;
};

ULudusAgentComponent::ULudusAgentComponent()
{
	PrimaryComponentTick.bCanEverTick = true;
}

void ULudusAgentComponent::BeginPlay()
{
	Super::BeginPlay();
	ludus::Options Options(Utf8(Host), static_cast<std::uint16_t>(Port), Utf8(ReadToken()));
	Options.deadline_ms = DeadlineMs;
	ludus::AgentSettings Settings;
	Settings.model = Utf8(Model);
	Settings.match = Utf8(Match);
	Settings.side = Utf8(Side);
	Settings.temperature = static_cast<double>(Temperature);
	State = MakeShared<FLudusAgentState>(Options, Settings);
}

void ULudusAgentComponent::EndPlay(const EEndPlayReason::Type EndPlayReason)
{
	// The thread of the requests ends by itself; only when the process or the module goes is it worth waiting for.
	const bool bGoes = EndPlayReason == EEndPlayReason::Quit || EndPlayReason == EEndPlayReason::EndPlayInEditor;
	if (State) State->Loop.close(bGoes ? QuitMilliseconds : 0);
	State.Reset();
	Super::EndPlay(EndPlayReason);
}

void ULudusAgentComponent::TickComponent(float DeltaTime, ELevelTick TickType, FActorComponentTickFunction* ThisTickFunction)
{
	Super::TickComponent(DeltaTime, TickType, ThisTickFunction);
	if (!State) return;
	if (State->bBegin) BeginEpisode();
	ludus::AgentLoop& Loop = State->Loop;
	Loop.update(FPlatformTime::Seconds());
	if (bWaitForActions)
	{
		Loop.wait(FPlatformTime::Seconds());  // for the end of the last episode,
		Loop.wait(FPlatformTime::Seconds());  // and for the start of this one
	}
	if (State->TicksToDecision > 0) --State->TicksToDecision;
	if (State->TicksToDecision == 0) DecideIfReady();
	if (bWaitForActions) Loop.wait(FPlatformTime::Seconds());
	Report();
	TakeAction();
	if (State->bActing) Act(State->Continuous, State->Discrete);
}

void ULudusAgentComponent::AddReward(float Reward)
{
	if (State && !State->bBegin) State->Reward += Reward;
}

void ULudusAgentComponent::EndEpisode()
{
	Finish(true);
}

void ULudusAgentComponent::InterruptEpisode()
{
	Finish(false);
}

bool ULudusAgentComponent::IsConnected() const
{
	return State && State->Loop.playing();
}

int32 ULudusAgentComponent::MissedDecisions() const
{
	return State ? static_cast<int32>(State->Loop.missed()) : 0;
}

void ULudusAgentComponent::OnConnectionChanged(const FString& Failure)
{
	if (Failure.IsEmpty()) UE_LOG(LogLudus, Log, TEXT("connected to %s:%d"), *Host, Port);
	else UE_LOG(LogLudus, Warning, TEXT("%s"), *Failure);
}

void ULudusAgentComponent::BeginEpisode()
{
	State->bBegin = false;
	State->bActing = false;
	State->Reward = 0.0f;
	State->TicksToDecision = 0;
	OnEpisodeBegin();
}

void ULudusAgentComponent::DecideIfReady()
{
	if (!State->Loop.ready()) return;
	State->Observation.Reset();
	Observe(State->Observation);
	State->Writer.begin(State->Loop.ticked() ? State->Reward : 0.0f);
	for (const float Value : State->Observation) State->Writer.f32(Value);
	State->Allowed.Reset();
	MaskActions(State->Allowed);
	if (State->Allowed.Num() > 0)
	{
		State->Writer.mask(nullptr, 0);  // sets the flag
		for (const bool bAllowed : State->Allowed) State->Writer.u8(bAllowed ? 1 : 0);
	}
	State->Loop.decide(State->Writer.body());
	State->Reward = 0.0f;
	State->TicksToDecision = DecisionPeriod;
}

void ULudusAgentComponent::TakeAction()
{
	if (!State->Loop.take_action(State->Reply)) return;
	ludus::RawReader Reader(State->Reply);
	State->Continuous.Reset();
	State->Discrete.Reset();
	for (int32 Index = 0; Index < Numbers; ++Index) State->Continuous.Add(Reader.f32());
	for (int32 Index = 0; Index < Choices; ++Index) State->Discrete.Add(Reader.i64());
	State->bActing = Reader.ok();
	if ((Reader.ok() && Reader.left() == 0) || State->bWarned) return;
	State->bWarned = true;
	UE_LOG(LogLudus, Warning, TEXT("An action has %d bytes, which are not %d numbers and %d choices. Compare them with GET /spec."),
		static_cast<int32>(State->Reply.size()), Numbers, Choices);
}

void ULudusAgentComponent::Finish(bool bTerminated)
{
	if (!State || State->bBegin) return;
	State->bBegin = true;
	if (!State->Loop.playing()) return;
	State->Observation.Reset();
	Observe(State->Observation);
	State->Writer.begin(State->Reward, bTerminated, !bTerminated);
	for (const float Value : State->Observation) State->Writer.f32(Value);
	State->Loop.end_episode(State->Writer.body());
}

void ULudusAgentComponent::Report()
{
	const ludus::Reply& Failure = State->Loop.failure();
	if (Failure.error == State->Reported) return;
	State->Reported = Failure.error;
	if (Failure.error == ludus::Error::None) OnConnectionChanged(FString());
	else OnConnectionChanged(FString(UTF8_TO_TCHAR((std::to_string(Failure.status) + " " + Failure.message + " " + Failure.hint).c_str())));
}
